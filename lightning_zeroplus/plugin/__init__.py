"""Everything that knows Lightning: the strategy, its checkpoint IO, the registered names."""
