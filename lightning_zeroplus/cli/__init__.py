"""The command line `zeroplus`: only what a shell needs; the features live in the other packages.

What it uses of them it takes from the package root, as any user's script does.
"""
