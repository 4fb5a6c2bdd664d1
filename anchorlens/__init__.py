"""anchorlens: how a language model learns from the examples in its prompt.

Hooks and metrics of "Label Words are Anchors" (Wang et al., EMNLP 2023) for any TransformerLens
model.
"""

from typing import TYPE_CHECKING

from .system.package import imported_at_first_use, installed_version

# PyTorch, pandas and SciPy take seconds to import; `anchorlens --help` needs none of them.
if TYPE_CHECKING:
    # In the order of the journey from prompts to results.
    # isort: off
    # prompts, and the edges in them
    from .prompts.tasks import TASKS as TASKS
    from .prompts.tasks import Task as Task
    from .prompts.chat import ChatTask as ChatTask
    from .prompts.examples import Example as Example
    from .prompts.examples import load_examples as load_examples
    from .prompts.examples import sample_demonstrations as sample_demonstrations
    from .prompts.examples import sample_queries as sample_queries
    from .prompts.sampled import sample_prompts as sample_prompts
    from .prompts.pairs import build_pairs as build_pairs
    from .prompts.pairs import sample_pairs as sample_pairs
    from .prompts.build import build_prompts as build_prompts
    from .prompts.build import build_segments as build_segments
    from .prompts.images import with_images as with_images
    from .prompts.batch import PromptBatch as PromptBatch
    from .prompts import edges as edges
    from .prompts import relabeling as relabeling

    # a model whose hooks act
    from .models.load import load_model as load_model
    from .models.load import prepare_model as prepare_model
    from .models.load import restore_model as restore_model

    # hooks that cut, scale or replace
    from .hooks import Site as Site
    from .questions import sites as sites
    from .hooks import isolate_labels as isolate_labels
    from .hooks import block_edges as block_edges
    from .hooks import scale_edges as scale_edges
    from .hooks import reweight_anchors as reweight_anchors
    from .hooks import detach_heads as detach_heads
    from .hooks import replace_heads as replace_heads

    # passes over all prompts
    from .runs.run import run as run
    from .runs.run import target_logits as target_logits
    from .passes import losses as losses
    from .runs import caches as caches
    from .runs.store import forget_run as forget_run
    from .runs.identity import named as named

    # what one pass answers
    from .metrics.accuracy import Accuracy as Accuracy
    from .metrics.loyalties import Loyalty as Loyalty
    from .metrics.saliency_flows import SaliencyFlows as SaliencyFlows
    from .metrics.segments import SegmentFlows as SegmentFlows
    from .metrics.segments import SegmentAttention as SegmentAttention
    from .metrics.segments import SegmentRollout as SegmentRollout
    from .metrics.aucroc import AttentionAUCROC as AttentionAUCROC
    from .metrics.distances import AnchorDistances as AnchorDistances
    from .metrics.label_heads import LabelHeads as LabelHeads
    from .metrics import weights as weights

    # what further passes answer
    from .questions.mean_loss import Loss as Loss
    from .questions.edge_sweep import EdgeSweep as EdgeSweep
    from .questions.integrated_flows import IntegratedFlows as IntegratedFlows
    from .questions.faithfulness import Faithfulness as Faithfulness
    from .questions.score_parts import ScoreParts as ScoreParts
    from .questions.prefix_effect import PrefixEffect as PrefixEffect
    from .questions.context_comparison import ContextComparison as ContextComparison
    from .ablation import removal as removal
    from .ablation import subsets as subsets

    # metrics and questions of your own
    from .metrics.question import Metric as Metric
    from .metrics.question import Question as Question
    from .metrics.question import Further as Further
    from .metrics import reads as reads
    from .results import kinds as kinds
    from .results.contributions import Contributions as Contributions

    # several runs, for one answer
    from .experiments.analysis import analyse as analyse
    from .experiments.head_effects import head_effects as head_effects
    from .experiments.task_vectors import task_vectors as task_vectors
    from .experiments.label_dependence import label_dependence as label_dependence
    from .experiments.retrieval_heads import retrieval_heads as retrieval_heads
    from .experiments.diagnosis import diagnose as diagnose
    from .replication.paper import paper as paper

    # what else can stand before a query
    from .contexts.compressed import compress as compress
    from .contexts.prefix import train_prefix as train_prefix
    from .contexts.soft_prompt import train_soft_prompt as train_soft_prompt
    from .contexts.hard_prompt_search import train_hard_prompt as train_hard_prompt

    # a few prompts, looked at closely
    from .experiments.saliency import saliency as saliency
    from .experiments.step_flows import step_flows as step_flows
    from .experiments.generation import trace_generation as trace_generation
    from .report.prompt_flows import plot_prompt as plot_prompt
    from .report.answer_flows import plot_answer as plot_answer

    # results
    from .results.record import Record as Record
    from .results.record import Results as Results
    from .report.claims import claims as claims
    from .report.page import write_report as write_report
    from .results import figures as figures

    # all errors have this class
    from .errors import AnchorlensError as AnchorlensError

    # classes of results, contexts, the paper's parts, and functions behind metrics and prompts
    from . import records as records
    from . import contexts as contexts
    from . import replication as replication
    from . import metrics as metrics
    from . import prompts as prompts

__version__ = installed_version("anchorlens")
__getattr__, __dir__, __all__ = imported_at_first_use(__name__, __file__)
