"""What runs beside the GPUs. Of the control plane it imports only orchestrator.protocol."""
