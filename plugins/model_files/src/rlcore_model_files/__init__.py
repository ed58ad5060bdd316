"""The files of a Hugging Face model directory: their faults, what they hold, and images for models that read them."""
