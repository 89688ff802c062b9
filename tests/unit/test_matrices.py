"""The table of matrices: shapes of published layers, and what a token is multiplied with."""

from omnibal_ext.adapters import adapted_matrices
from omnibal_ext.architectures.presets import PRESETS, preset
from omnibal_ext.matrices import matrices_of
from omnibal_ext.modalities.matrix import Matrix


def named(kind: str, model: str, ranks: int = 1) -> dict[str, Matrix]:
    return {matrix.name: matrix for matrix in matrices_of(preset(model), ranks)[kind]}


def test_a_gate_of_the_output_is_projected_beside_every_query() -> None:
    """Qwen3.5-9B: 16 heads of 256 in 4 groups, with a gate for each number; adapters know it too."""
    qkv = named("llm.3", "qwen3.5-9b")["self_attention.linear_qkv"]
    assert (qkv.rows, qkv.columns, qkv.shares) == (2 * 16 * 256 + 2 * 4 * 256, 4096, (2 * 4 * 256, 256, 256))
    assert qkv in adapted_matrices(preset("qwen3.5-9b"))["llm.3"]
    linear = named("llm", "qwen3.5-9b")["self_attention.linear_qkv"]
    assert linear.rows == 16 * sum(linear.shares)
    assert linear.shares == (2 * 128 + 2 * 128, 2 * 128, 2, 2)
    assert linear in adapted_matrices(preset("qwen3.5-9b"))["llm"]


def test_a_token_is_multiplied_with_the_experts_that_it_goes_through() -> None:
    """InternVL3.5-30B-A3B: 128 experts of width 768, 8 of them for a token, hidden states of 2048."""
    opened = named("llm", "internvl3.5-30b-a3b")["mlp.experts.experts.linear_fc1"]
    assert opened.shape == (128, 2 * 768, 2048)
    assert (opened.weights, opened.multiplied) == (128 * 2 * 768 * 2048, 8 * 2 * 768 * 2048)
    assert not opened.is_adaptable


def test_layers_in_front_of_experts_have_one_perceptron() -> None:
    """GLM-4.5V: the first layer's perceptron is 10,944 wide."""
    assert named("llm", "glm-4.5v")["mlp.linear_fc1"].shape == (2 * 10944, 4096)


def test_heads_are_filled_up_for_ranks_that_do_not_divide_them() -> None:
    assert named("vit", "internvl-chat-1.5")["self_attention.linear_proj"].columns == 25 * 128
    assert named("vit", "internvl-chat-1.5", 8)["self_attention.linear_proj"].columns == 32 * 128


def test_rows_of_a_matrix_of_several_are_whole_groups_of_them() -> None:
    for model in PRESETS.values():
        for matrix in (matrix for table in matrices_of(model).values() for matrix in table):
            if matrix.fused > 1:
                assert matrix.rows % sum(matrix.shares) == 0, (model.name, matrix)
