"""The base of every engine: process groups, blocks, initial weights, precision, compilation and optimizers."""
