"""What CUDA's kernels allocate inside themselves while they run, as far as it is known."""


def internal_bytes(name: str, inputs: list, outputs: list) -> int:
    """Bytes for an operator, given its name and tensors."""
    if (
        name == "aten::_scaled_dot_product_flash_attention_backward"
    ):  # dq in fp32, and the row sums of the softmax's gradient
        query = inputs[1]
        batch, heads, length, head = query.shape
        return 4 * batch * heads * (length + 127) // 128 * 128 * ((head + 31) // 32 * 32 + 1)
    if name == "aten::_ctc_loss_backward":  # log_beta, as large as log_alpha
        return (
            max(t.numel() * t.element_size() for t in inputs if t.dim() == 3 and t.shape != outputs[0].shape)
            if len(inputs) > 2
            else 0
        )
    if name == "aten::embedding_dense_backward":  # the indices, sorted, with their origins
        return 4 * inputs[1].numel() * 8
    if name in ("aten::convolution", "aten::convolution_backward"):
        # Three dimensions are laid out anew before the kernel runs, if they were permuted.
        return sum(t.numel() * t.element_size() for t in inputs if t.dim() == 3 and not t.is_contiguous())
    return 0
