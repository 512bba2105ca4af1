"""The text of the walkthrough, in English and in Chinese: one entry per step, the same names in both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class StepWords:
    """Title and meaning of one step; the meaning is a format string over the numbers of the call."""

    title: str
    meaning: str


@dataclass(frozen=True)
class Language:
    """All the words of one language.

    Args:
        letters: what each letter of a shape stands for.
        steps: words of each step by its name; ``mask_none`` is said instead of ``mask`` when there is none.
        phrases: every other sentence, by name.
    """

    letters: Mapping[str, str]
    steps: Mapping[str, StepWords]
    phrases: Mapping[str, str]


ENGLISH = Language(
    letters={
        "B": "batch size",
        "H": "heads",
        "Hkv": "key/value heads",
        "L": "query length",
        "S": "key length",
        "D": "head dim",
        "E": "embed dim",
        "Eq": "query input dim",
        "Ek": "key input dim",
        "Ev": "value input dim",
    },
    steps={
        "input": StepWords(
            "Input",
            "One vector per token. Attention lets each position collect, from the positions it may see, the "
            "information it needs.",
        ),
        "key_input": StepWords(
            "Input for the keys",
            "The sequence that is looked at (cross-attention): its length S may differ from the query length L.",
        ),
        "value_input": StepWords(
            "Input for the values",
            "What is handed over comes from a third tensor, which goes with the keys position by position.",
        ),
        "query_projection": StepWords(
            "Projection: queries",
            "A learned linear layer turns each vector into a query: what this position is looking for.",
        ),
        "key_projection": StepWords(
            "Projection: keys",
            "A second layer makes the keys: what each position offers to be found by. Queries are compared with them.",
        ),
        "value_projection": StepWords(
            "Projection: values",
            "A third layer makes the values: what a position hands over once it is looked at.",
        ),
        "query_heads": StepWords(
            "Split heads: queries",
            "The {query_width} numbers of each query are cut into {H} heads of {D}. Every head does "
            "attention by itself, so different heads can follow different relations: hence multi-head "
            "attention.",
        ),
        "key_heads": StepWords(
            "Split heads: keys", "The keys are cut in the same way, so that each head compares its own part."
        ),
        "value_heads": StepWords("Split heads: values", "And so are the values: each head collects from its own part."),
        "shared_heads": StepWords(
            "Grouped heads",
            "There are {H} query heads but only {Hkv} key/value heads, so each key/value head serves "
            "{group} query heads (grouped-query attention, which saves memory): {sharing}. The keys are "
            "shown here once per query head; the values are shared in the same way.",
        ),
        "query_norm": StepWords("Norm: queries", "Each head's query is normalised, which limits the scores."),
        "key_norm": StepWords("Norm: keys", "Each head's key is normalised, which limits the scores."),
        "query_position": StepWords(
            "Positions: queries",
            "Attention by itself does not depend on the order of the tokens. The position part changes each query "
            "according to its position, so that the order counts.",
        ),
        "key_position": StepWords("Positions: keys", "The keys are changed in the same way, each by its own position."),
        "scores": StepWords(
            "Scores",
            "The dot product of every query with every key says how well the two match. The scale keeps "
            "the scores from growing with the head dim, which would make the softmax pick one key alone.",
        ),
        "softcap": StepWords(
            "Soft-cap", "The soft-cap limits the scores to the range from -{softcap} to {softcap}: none gets too large."
        ),
        "own_mask": StepWords(
            "Mask of the module",
            "The module has its own mask, {rule}, which every call uses. Here it hides {hidden} of {total} scores.",
        ),
        "mask": StepWords(
            "Mask",
            "The mask sets the scores of keys that a query may not see to -∞, for example later tokens or "
            "padding. Here it hides {hidden} of {total} scores.",
        ),
        "mask_bias": StepWords(
            "Mask",
            "The mask adds its bias to the scores, and sets those of keys that a query may not see to -∞. "
            "Here it hides {hidden} of {total} scores.",
        ),
        "mask_none": StepWords(
            "Mask", "No mask was given: every query may see every key, and the scores stay as they are."
        ),
        "mask_own_only": StepWords("Mask", "The call has no mask, so the module's own mask is the only one."),
        "sinks": StepWords(
            "Sinks",
            "Each head has a learned number, its sink, which is one more term in the softmax's denominator. It acts "
            "like a key whose value is zero: a query that finds no fitting key can put its attention there.",
        ),
        "softmax": StepWords(
            "Softmax",
            "Each row of scores becomes weights that are at least 0 and add up to 1: how much of its "
            "attention query i gives to each key j. A score of -∞ becomes a weight of exactly 0.",
        ),
        "softmax_sinks": StepWords(
            "Softmax",
            "Each row of scores becomes weights that are at least 0: how much of its attention query i gives to each "
            "key j. They add up to less than 1, because the sink takes the rest. A score of -∞ becomes a weight of "
            "exactly 0.",
        ),
        "weighted_sum": StepWords(
            "Weighted sum",
            "Each query collects the values, each multiplied by its weight: the positions it looks at most "
            "contribute most.",
        ),
        "merge": StepWords(
            "Merge heads", "The results of the {H} heads are put side by side again: one vector per position."
        ),
        "output_projection": StepWords(
            "Output projection",
            "A last learned layer mixes what the heads have found into one vector of {E} numbers per "
            "position. This is what the module returns.",
        ),
    },
    phrases={
        "heading": "Multi-head attention, step by step",
        "letters": "The letters of the shapes:",
        "shape": "shape",
        "formula": "formula",
        "self_attention": "S equals L: keys and queries come from the same sequence (self-attention).",
        "weights": "weights of batch item 0, head 0 (a row per query, a column per key):",
        "hidden_rows": "Note: in {count} of the {rows} rows of scores the query sees no key at all "
        "({places}). The weights of such a row are all 0, and so is what its head collects; where this "
        "holds for every head of a query, its output is out_proj(0).",
        "place": "batch {b}, head {h}, query {q}",
        "place_all_heads": "batch {b}, query {q}, every head",
        "more": "and more",
        "training": "The module is in training mode. These steps are those of evaluation mode: dropout is left out.",
        "agrees": "Largest difference between these steps and module(query, …) itself: {difference}.",
        "disagrees": "Largest difference between these steps and module(query, …) itself: "
        "{difference}. That is more than rounding explains: the module does something that these steps "
        "do not show.",
        "hidden": "s_ij = -∞ where key j is hidden from query i",
        "biased": "s_ij = s_ij + bias_ij",
        "sharing": "query heads {first}–{last} use key/value head {kv}",
        "separator": ", ",
        "place_separator": "; ",
        "colon": ": ",
    },
)

CHINESE = Language(
    letters={
        "B": "批大小",
        "H": "头数",
        "Hkv": "键/值头数",
        "L": "查询长度",
        "S": "键长度",
        "D": "每个头的维度",
        "E": "嵌入维度",
        "Eq": "查询输入的维度",
        "Ek": "键输入的维度",
        "Ev": "值输入的维度",
    },
    steps={
        "input": StepWords(
            "输入",
            "每个词元（token）用一个向量表示。注意力让每个位置从它能看到的位置那里取来自己需要的信息。",
        ),
        "key_input": StepWords("键的输入", "这是被查看的另一段序列（交叉注意力），它的长度 S 可以与查询长度 L 不同。"),
        "value_input": StepWords("值的输入", "值来自第三个张量，它与键按位置一一对应。"),
        "query_projection": StepWords(
            "线性投影：查询", "一个可学习的线性层把每个向量变成查询（query），表示“这个位置在找什么”。"
        ),
        "key_projection": StepWords(
            "线性投影：键", "第二个线性层得到键（key），表示“这个位置凭什么被找到”，查询将与键逐一比较。"
        ),
        "value_projection": StepWords(
            "线性投影：值", "第三个线性层得到值（value），即一个位置被关注时真正交出去的内容。"
        ),
        "query_heads": StepWords(
            "拆分多头：查询",
            "把每个 {query_width} 维的查询切成 {H} 个头，每个头 {D} 维。各个头独立计算注意力，"
            "因而可以关注不同的关系，这就是“多头注意力”。",
        ),
        "key_heads": StepWords("拆分多头：键", "键也按同样的方式切开，每个头只比较属于自己的那一份。"),
        "value_heads": StepWords("拆分多头：值", "值同样切开，每个头只从属于自己的那一份里取信息。"),
        "shared_heads": StepWords(
            "分组共享键和值",
            "查询有 {H} 个头，键和值只有 {Hkv} 个头，所以每个键/值头供 {group} 个查询头共用"
            "（分组查询注意力，可以节省内存）：{sharing}。这里按查询头列出所用的键，值的共享方式相同。",
        ),
        "query_norm": StepWords("归一化：查询", "对每个头的查询做归一化，这样查询里的数值再大，得分也不会随之变大。"),
        "key_norm": StepWords("归一化：键", "对每个头的键做归一化，这样键里的数值再大，得分也不会随之变大。"),
        "query_position": StepWords(
            "位置编码：查询",
            "注意力本身与词元的先后顺序无关。位置编码按每个查询所在的位置改变它，这样顺序才起作用。",
        ),
        "key_position": StepWords("位置编码：键", "键也按同样的方式改变，每个键按它自己的位置。"),
        "scores": StepWords(
            "缩放点积得分",
            "每个查询与每个键做点积，得分越高说明两者越匹配。乘以缩放系数，"
            "是为了不让得分随维度变大而变大，否则 softmax 几乎只会选中一个键。",
        ),
        "softcap": StepWords(
            "得分软上限", "软上限（soft-cap）把得分限制在 -{softcap} 到 {softcap} 之间，避免得分过大。"
        ),
        "own_mask": StepWords(
            "模块自带的掩码",
            "模块自带掩码 {rule}，每次调用都会使用它。这里共有 {total} 个得分，其中 {hidden} 个被遮住。",
        ),
        "mask": StepWords(
            "掩码",
            "掩码把查询不允许看到的键（例如后面的词元或填充）的得分设为 -∞。"
            "这里共有 {total} 个得分，其中 {hidden} 个被遮住。",
        ),
        "mask_bias": StepWords(
            "掩码",
            "掩码先给得分加上偏置，再把查询不允许看到的键的得分设为 -∞。"
            "这里共有 {total} 个得分，其中 {hidden} 个被遮住。",
        ),
        "mask_none": StepWords("掩码", "没有给出掩码：每个查询都能看到所有的键，得分保持不变。"),
        "mask_own_only": StepWords("掩码", "这次调用没有给出掩码，只有模块自带的掩码起作用。"),
        "sinks": StepWords(
            "注意力汇",
            "每个头有一个可学习的数（sink），它作为一项加进 softmax 的分母。"
            "它就像一个值为零的键：查询找不到合适的键时，可以把注意力放在那里。",
        ),
        "softmax": StepWords(
            "softmax 归一化",
            "把每一行得分变成非负且总和为 1 的注意力权重，表示查询 i 把多少注意力分给键 j。"
            "得分为 -∞ 的位置，权重恰好为 0。",
        ),
        "softmax_sinks": StepWords(
            "softmax 归一化",
            "把每一行得分变成非负的注意力权重，表示查询 i 把多少注意力分给键 j。"
            "总和小于 1，其余部分归于 sink。得分为 -∞ 的位置，权重恰好为 0。",
        ),
        "weighted_sum": StepWords("加权求和", "每个查询按权重对值加权求和：它越关注哪个位置，哪个位置的值贡献就越大。"),
        "merge": StepWords("合并多头", "把 {H} 个头的结果重新首尾拼接，每个位置又只有一个向量。"),
        "output_projection": StepWords(
            "输出投影",
            "最后一个可学习的线性层把各个头取到的信息混合起来，每个位置得到一个 {E} 维的向量，这就是模块的输出。",
        ),
    },
    phrases={
        "heading": "逐步看懂多头注意力",
        "letters": "形状中各字母的含义：",
        "shape": "形状",
        "formula": "公式",
        "self_attention": "S 等于 L：键和查询来自同一段序列（自注意力）。",
        "weights": "第 0 个样本、第 0 个头的注意力权重（每行一个查询，每列一个键）：",
        "hidden_rows": "注意：得分共有 {rows} 行，其中 {count} 行的查询看不到任何键（{places}）。"
        "这些行的权重全为 0，对应的头取到的也全是 0；若某个查询的所有头都如此，"
        "它的输出就是 out_proj(0)。",
        "place": "样本 {b}、头 {h}、查询 {q}",
        "place_all_heads": "样本 {b}、查询 {q} 的所有头",
        "more": "等等",
        "training": "模块处于训练模式；这里按评估模式计算，不使用 dropout。",
        "agrees": "以上逐步计算的结果与直接调用 module(query, …) 的结果，最大相差 {difference}。",
        "disagrees": "以上逐步计算的结果与直接调用 module(query, …) 的结果，最大相差 {difference}，"
        "超出了舍入误差的范围：模块还做了这里没有列出的计算。",
        "hidden": "s_ij = -∞（查询 i 看不到键 j 时）",
        "biased": "s_ij = s_ij + bias_ij",
        "sharing": "查询头 {first}–{last} 共用键/值头 {kv}",
        "separator": "，",
        "place_separator": "；",
        "colon": "：",
    },
)

LANGUAGES: Mapping[str, Language] = {"en": ENGLISH, "zh": CHINESE}
