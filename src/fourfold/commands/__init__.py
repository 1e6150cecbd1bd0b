"""The commands of `fourfold`: `options` declares the options of all of them, and the other files hold their bodies."""
