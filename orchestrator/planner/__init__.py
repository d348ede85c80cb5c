"""Pure arithmetic before anything is launched: mesh, memory, bytes, and why."""
