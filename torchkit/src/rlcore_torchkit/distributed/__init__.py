"""Ranks and their devices: process groups, numbering, agreement, memory that is handed back."""
