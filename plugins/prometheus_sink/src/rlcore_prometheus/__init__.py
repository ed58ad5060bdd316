"""Sink for rlcore: Prometheus"""
