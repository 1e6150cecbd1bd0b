"""The commands of `fourfold`: `options` declares what they take, and each command has a file for what it does."""
