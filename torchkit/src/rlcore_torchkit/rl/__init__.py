"""The mathematics of policy gradients, for any algorithm; each formula names its source.

`advantages` rewards to advantages (numpy, on the driver), `clipping` ratios and the clipped objective, `correction` truncated
importance sampling between generator and trainer, `kl` estimators of the divergence from a reference, `normalisation` what each
token counts, `metrics` means and maxima of these.
"""
