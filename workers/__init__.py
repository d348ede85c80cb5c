"""The side of the GPUs. Imports only protocol, api, errors and limits of the control plane."""
