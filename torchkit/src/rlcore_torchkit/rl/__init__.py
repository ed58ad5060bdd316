"""The mathematics of policy gradients, for any algorithm; each formula names its source.

On the driver, in numpy: `advantages` rewards to advantages of samples, `gae` rewards and a critic's values to those of tokens.
In the worker, in torch: `ratio` how the policy has moved, of tokens or of whole sequences (`sequences`); `objective`,
`clipping`, `soft` what is minimised; `correction` weights and masks for what the generator did otherwise; `kl` estimators of
the divergence from a reference; `normalisation` what each token counts; `value_loss` what a critic minimises; `metrics` means
and maxima of these.
"""
