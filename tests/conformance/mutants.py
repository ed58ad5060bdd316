"""The register of mutants: backends that are each wrong in one known way."""

MUTANTS = {}
"""Class by name of its test class; `killed_by` of each is the check that has to fail."""


def killed_by(check):
    """Registers a class, under its module's name and its own."""

    def register(cls):
        cls.killed_by = check
        MUTANTS[f"Test{cls.__module__.removeprefix('mutant_').title()}{cls.__name__}"] = cls
        return cls

    return register
