"""The conformance kit: what every trainer and every generator has to pass.

A provider's tests are one class and one fixture; everything else has a default and can be overridden by a fixture of the
same name (see `TrainerConformance` and `GeneratorConformance`). A declared capability must pass its checks; those of an
undeclared one are skipped.
"""
