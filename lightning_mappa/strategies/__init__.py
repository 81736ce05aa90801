"""How an agent's weights and optimizer lie on its ranks."""
