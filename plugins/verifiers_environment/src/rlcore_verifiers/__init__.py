"""Environments of the verifiers hub for rlcore"""
