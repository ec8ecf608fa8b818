"""The memory that some of CUDA's kernels allocate inside themselves while they run."""


def internal_bytes(name: str, inputs: list, outputs: list) -> int:
    """Bytes for an operator, given its name and tensors."""
    name = name.removeprefix("aten::")
    if name == "_scaled_dot_product_flash_attention_backward":
        # dq in fp32, and the row sums of the softmax's gradient, in tiles of 128 rows and 32
        # columns
        batch, heads, length, head = inputs[1].shape
        return 4 * batch * heads * (-(-length // 128) * 128) * (-(-head // 32) * 32 + 1)
    if name == "_ctc_loss_backward":
        # log_beta, as large as log_alpha, the other input of three dimensions
        sizes = [t.nbytes for t in inputs if t.dim() == 3 and t.shape != outputs[0].shape]
        return max(sizes, default=0)
    if name == "embedding_dense_backward":
        return 4 * inputs[1].numel() * 8  # the indices, sorted, with their origins
    if name in ("convolution", "convolution_backward"):
        # Three dimensions are laid out anew before the kernel runs, if they were permuted.
        return sum(t.nbytes for t in inputs if t.dim() == 3 and not t.is_contiguous())
    return 0
