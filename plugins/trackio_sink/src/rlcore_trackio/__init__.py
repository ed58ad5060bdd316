"""Sink for rlcore: Trackio"""
