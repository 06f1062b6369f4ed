"""Scripts that make the shipped backbones, and measure them."""
