"""Environments for rlcore: arithmetic and mathematics with verifiable answers"""
