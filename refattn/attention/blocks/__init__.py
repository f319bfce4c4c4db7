"""How mechanisms that cut blocks of their own cut them."""
