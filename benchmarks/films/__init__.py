"""A reward model of film reviews: how well it tells favourable ones, after how long."""
