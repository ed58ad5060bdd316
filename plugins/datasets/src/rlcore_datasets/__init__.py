"""Data sources of rlcore recipes: CSV, Parquet, and data sets of the Hugging Face Hub."""
