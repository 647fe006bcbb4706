"""Other tools' loops, watched in one line each: one module a tool, which alone imports that tool."""
