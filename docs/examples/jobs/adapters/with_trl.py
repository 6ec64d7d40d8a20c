from pathlib import Path

from datasets import Dataset
from job import ACCUMULATE, BATCH, EPOCHS, RATE, WARMUP, chats, collate, make, report
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

options = SFTConfig(
    output_dir="run",
    num_train_epochs=EPOCHS,
    per_device_train_batch_size=BATCH,
    gradient_accumulation_steps=ACCUMULATE,
    learning_rate=RATE,
    warmup_steps=WARMUP,
    lr_scheduler_type="cosine",
    max_grad_norm=0.5,
    save_steps=4,
    train_sampling_strategy="sequential",
    bf16=False,
    gradient_checkpointing=False,
    use_cpu=True,
    report_to="none",
    max_length=None,
    loss_type="nll",
    dataset_kwargs={"skip_prepare_dataset": True},
    remove_unused_columns=False,
)
tokenizer = PreTrainedTokenizerFast(  # it asks for one, although everything is tokenized
    tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0}, "<pad>")), pad_token="<pad>", eos_token="<pad>"
)
trainer = SFTTrainer(make(), options, collate, Dataset.from_list(chats()), processing_class=tokenizer)
last = get_last_checkpoint("run") if Path("run").exists() else None
trainer.train(resume_from_checkpoint=last)
trainer.save_model("adapter")
if trainer.is_world_process_zero():
    report(trainer.model)
