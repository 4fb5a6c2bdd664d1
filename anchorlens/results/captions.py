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
    "Positions cannot read others along the edges that are cut. Label loyalty: share of predicted "
    "labels that stay. Word loyalty: overlap (Jaccard) of the 5 likeliest next words. All of it "
    "stays where the cut changes nothing. Random edges: as many in each prompt, mean of the draws. "
    "The paper has no such figure."
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
    "context, without BOS, as a mean over layers and heads. The paper has no such figure."
)
LABEL_HEADS = (
    "Top: share of prompts in which the target's attention to all label words is above 5/n, n the "
    "number of tokens. Bottom: how many more heads of a layer are above the threshold for label "
    "words than for random positions; 0 says that label words are not special. In the source (Cho "
    "et al., ICLR 2025) the step of copying comes before the step of reading."
)
