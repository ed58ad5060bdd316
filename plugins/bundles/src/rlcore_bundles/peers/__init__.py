"""Adapters of other frameworks: each calls the framework's own functions, in the environment in which that is installed.

The modules of this folder import neither rlcore nor attrs, which that environment may lack.
"""
