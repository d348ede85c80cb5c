"""What is checked about the house itself."""
