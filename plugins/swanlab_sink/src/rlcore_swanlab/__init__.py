"""Sink for rlcore: SwanLab"""
