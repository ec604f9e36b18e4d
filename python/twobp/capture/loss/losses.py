"""The losses among PyTorch's operators, and where their arguments say how they reduce."""

from ..own_operators import aten

MEAN, SUM = 1, 2  # of at::Reduction
# Maps an operator to the position of its `reduction`, for losses that average over their elements.
ELEMENTWISE = {
    aten.mse_loss.default: 2,
    aten.l1_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
    aten.soft_margin_loss.default: 2,
    aten.kl_div.default: 2,
    aten.poisson_nll_loss.default: 5,
    aten.hinge_embedding_loss.default: 3,
    aten.margin_ranking_loss.default: 4,
}
# The same for losses that average over rows.
ROWWISE = {aten.cosine_embedding_loss.default: 4, aten.triplet_margin_loss.default: 7}
# Maps a loss over classes to the positions of `reduction` and `ignore_index`.
NLL = {
    aten.cross_entropy_loss.default: (3, 4),
    aten.nll_loss.default: (3, 4),
    aten.nll_loss_nd.default: (3, 4),
    aten.nll_loss_forward.default: (3, 4),
    aten.nll_loss2d.default: (3, 4),
    aten.nll_loss2d_forward.default: (3, 4),
}
