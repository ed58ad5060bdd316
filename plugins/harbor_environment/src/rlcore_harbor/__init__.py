"""Tasks of Harbor as an environment for rlcore"""
