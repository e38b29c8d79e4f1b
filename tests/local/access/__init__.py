"""Ways in which training code touches its parameters, each written once for plain and sharded."""
