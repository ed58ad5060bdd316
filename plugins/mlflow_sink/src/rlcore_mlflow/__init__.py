"""Sink for rlcore: MLflow"""
