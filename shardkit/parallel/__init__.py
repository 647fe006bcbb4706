"""What every engine builds on: the process groups, and how one block is initialised, cast, compiled and updated."""
