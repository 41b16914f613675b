"""The trainers of this package: each is the multi-turn trainer with the credit rule of one algorithm."""

from agile_trainers.algorithms.cispo import CISPO
from agile_trainers.algorithms.distillation import Distillation
from agile_trainers.algorithms.grpo import GRPO
from agile_trainers.algorithms.gspo import GSPO
from agile_trainers.algorithms.ppo import PPO
from agile_trainers.algorithms.reinforce import REINFORCE
from agile_trainers.trainers.trainer import MultiTurnTrainer


class MultiTurnGRPOTrainer(GRPO, MultiTurnTrainer):
    """GRPO over multi-turn episodes (DeepSeekMath, https://huggingface.co/papers/2402.03300).

    Without an environment this is TRL's ``GRPOTrainer``. See :class:`MultiTurnTrainer` for the arguments.
    """


class MultiTurnGSPOTrainer(GSPO, MultiTurnTrainer):
    """Group sequence policy optimization (https://huggingface.co/papers/2507.18071) over multi-turn episodes."""


class MultiTurnCISPOTrainer(CISPO, MultiTurnTrainer):
    """CISPO (MiniMax-M1, https://huggingface.co/papers/2506.13585) over multi-turn episodes."""


class MultiTurnREINFORCETrainer(REINFORCE, MultiTurnTrainer):
    """REINFORCE over multi-turn episodes; the baseline and the scale are those of the whole batch.

    The advantage of a turn is its discounted return, z-scored over every turn of every episode of the generation batch,
    on all ranks (return batch normalization, GEM: https://huggingface.co/papers/2510.01051). No groups, no critic: every
    episode may start from a state of its own. Of several environments each has statistics of its own. See
    :class:`MultiTurnTrainer` for the arguments; an environment is required.
    """


class MultiTurnDistillationTrainer(Distillation, MultiTurnTrainer):
    """Distillation of a teacher over the policy's own multi-turn episodes (https://huggingface.co/papers/2306.13649).

    Rewards are logged and not trained on. See :class:`MultiTurnTrainer` for the arguments; an environment and
    ``args.teacher`` are required.
    """


class MultiTurnPPOTrainer(PPO, MultiTurnTrainer):
    """PPO over multi-turn episodes (https://huggingface.co/papers/1707.06347) with generalized advantage estimates over
    turns (https://huggingface.co/papers/1506.02438).

    Policy and critic are two LoRA adapters on one frozen base, ``default`` and ``critic``; the critic has a value head.
    Both are saved in PEFT's format, the critic under ``critic/``. See :class:`MultiTurnTrainer` for the arguments; an
    environment and a ``peft_config`` are required.

    Raises:
        ValueError: Without ``peft_config``, or with an optimizer made before the critic was.
    """
