"""The agent's process: event loop, connections, working directory."""
