"""Where nodes come from: one machine today; Ray and Kubernetes later. Backends obey, never decide."""
