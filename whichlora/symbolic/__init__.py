"""The code of one layer, written on a small symbolic autograd that counts what stays alive."""
