"""`python -m rlcore_doctor`: the command without rlcore's command line, which a broken library may keep from starting."""

import sys

from rlcore_doctor.command import doctor_command

if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr] # a terminal may lack characters
    doctor_command(prog_name="python -m rlcore_doctor")
