"""Tokens and log-probabilities against transformers' own modules and float64 numpy."""

import numpy as np
import pytest
import torch
from conftest import checkpoint_tensors

