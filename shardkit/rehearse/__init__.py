"""Rehearse any program, unchanged, on emulated GPUs: does it start, and does it fit?"""
