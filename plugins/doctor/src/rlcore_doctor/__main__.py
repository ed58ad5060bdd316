"""`python -m rlcore_doctor`: the command without rlcore's command line, which a broken library may keep from starting."""

from rlcore_doctor.command import doctor_command

if __name__ == "__main__":
    doctor_command(prog_name="python -m rlcore_doctor")
