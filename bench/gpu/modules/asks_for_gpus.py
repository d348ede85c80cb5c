"""A module that asks torch for GPUs when it is imported, as torchao and accelerate do."""

import torch

HAS_GPU = torch.cuda.is_available()
