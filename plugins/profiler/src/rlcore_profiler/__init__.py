"""Observers of rlcore: what each rank does, and traces of chosen steps"""
