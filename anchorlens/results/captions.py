"""What the paper's figures show, how to read them, and what the paper found: one text for each.

The report writes them under its figures, and ``paper`` under its tables.
"""

FLOWS = (
    "S_wp: from the demonstrations' texts to their label words. S_pq: from label words to the "
    "target, where the answer is predicted. S_ww: between all other words. In the paper S_wp is "
    "large in shallow layers, and S_pq in deep ones."
)
RATIO = (
    "S_pq / S_tq (not in the paper): S_pq over the mean saliency from all other words to the "
    "target; about 1 says that label words are read no more than those."
)
ISOLATION = (
    "Isolated words cannot collect information from the words before them. Label loyalty: share of "
    "predicted labels that stay. Word loyalty: overlap (Jaccard) of the 5 likeliest next words. "
    "All of it stays where isolation changes nothing. Random words: as many, mean of the draws. In "
    "the paper label words in the first layers matter most."
)
CUT_EDGES = (
    "Positions cannot read others along the edges that are cut, and isolated words cannot collect "
    "information from the words before them. Label loyalty: share of predicted labels that stay. "
    "Word loyalty: overlap (Jaccard) of the 5 likeliest next words. All of it stays where the cut "
    "changes nothing. Random edges or words: as many, mean of the draws. In the paper label words "
    "isolated in the first layers matter most."
)
KEEP_BOS = (
    "Where the BOS edge is kept, label words still attend to BOS, which the paper's prompts do not "
    "have."
)
ATTENTION = (
    "AUCROC_l: how well the target's attention to the label words in layer l tells the predicted "
    "label; 0.5 is chance. In the paper about 0.8 in deep layers. R_l: the part that the layers up "
    "to l have in the sum of AUCROC_l - 0.5 over all layers; there is none where the sum is not "
    "above 0."
)
CONFUSIONS = (
    "Left: distance of the label words' keys along the main directions of the queries (predicted). "
    "Right: AUC-ROC of telling two classes apart (actual). Low, that is dark, means confused in "
    "both. In the paper the most confused pair of TREC is dark on both sides."
)
PREFIX_EFFECT = (
    "Top: stolen attention, the part of the attention of the query's rows that goes to the "
    "demonstrations, 0 to 1. Bottom: what changes the output of the attention. Direct: attention "
    "taken in this layer. Indirect: what the demonstrations changed in earlier layers; 0 in the "
    "first layer. Both are lengths, in units of the output without demonstrations. The paper has "
    "no such figure."
)
CONTEXTS = (
    "The same queries after each context. Loyalty: to the demonstrations, that is to the answers "
    "from whole prompts. Stolen attention: the part of the target's attention that goes to the "
    "context, without BOS, as a mean over layers and heads. Random words, if drawn, stand in place "
    "of the label words: high bars beside low ones of theirs say that the label words in "
    "particular carry what is needed. In the paper (GPT2-XL) 79 % of the labels stay with label "
    "words and format alone, and 49 % with random words."
)
LABEL_HEADS = (
    "Top: share of prompts in which the target's attention to all label words is above 5/n, n the "
    "number of tokens. Bottom: how many more heads of a layer are above the threshold for label "
    "words than for random positions; 0 says that label words are not special. In the source (Cho "
    "et al., ICLR 2025) the step of copying comes before the step of reading."
)
LOYALTY = (
    "Label loyalty: share of predicted labels that stay in the changed run. Word loyalty: overlap "
    "(Jaccard) of the likeliest next words. Both are 1 where the change matters to no answer. In "
    "the paper they are lowest where label words are isolated in the first layers."
)
BETA = (
    "exp(beta) multiplies the target's attention to a label word. At 1 nothing changes; above 1 "
    "the label word is read more, below 1 less. The loss falls where re-weighting helps on the "
    "prompts that it was trained on. In the paper it raises the accuracy on all four tasks."
)
ACCURACY = (
    "Share of queries whose predicted label is the true one. Compare it with that of naming the "
    "commonest class: if the interval includes this share, there may be no answer to explain. In "
    "the paper GPT2-XL has 15 % to 73 % with one demonstration a class, by task."
)
ACCURACIES = (
    "Share of queries whose predicted label is the true one, by method, on the same queries. The "
    "gain over the first method and its interval are among the numbers: these tell more than "
    "whether two bars overlap. In the paper re-weighting is above one demonstration a class on all "
    "four tasks."
)
DIAGNOSIS = (
    f"{CONFUSIONS} Below: rank correlation of distance and confusion over pairs of classes, by "
    "layer; near 1, the keys predict which classes are confused. Dashed: correlation of distance "
    "with the positions of the label words; where it is high, too, position may be the reason."
)
TRAINING = (
    "Loss of each step's batch, and loss and accuracy on held-out queries, which are not trained "
    "on. Training returns the step with the highest held-out accuracy. A held-out loss that rises "
    "while the loss of the steps falls says that the training queries are learned by heart. The "
    "paper has no such figure."
)
