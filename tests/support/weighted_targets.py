import torch
from small_trainers import make_trainer
from tiny_models import tiny_model

from metaphrase.training.training_loss import TrainingLoss, weights_of_labels


def log_probs_alone(model, source, targets):
    """Log-probabilities of targets, each in a padded batch of its own, with their graph."""
    outputs = [model(input_ids=torch.tensor([source]), labels=torch.tensor([ids])).loss * len(ids) for ids in targets]
    return -torch.stack(outputs)


def gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def weighted_loss(model, batch):
    """The loss that the trainer computes for a batch with weights, before it divides by the labels."""
    inputs, weights = {name: value for name, value in batch.items() if name != "weight"}, weights_of_labels(batch)

    def loss(*arguments):
        return TrainingLoss()(*arguments, label_weights=weights)

    return model(**inputs, loss_of_states=loss, num_items_in_batch=1).loss


def assert_accumulated_equal(make_training, pairs, folder, **options):
    """Require that one batch of all pairs and accumulated batches of one pair train the same weights."""
    weights = []
    for size in (len(pairs), 1):
        model = tiny_model(vocab_size=37, hidden_size=16, encoder_ffn_dim=16, decoder_ffn_dim=16)
        training = make_training()
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": len(pairs) // size}
        more = {"replace_batch": training, "callbacks": [training], "optim": "sgd", "eval_dataset": None}
        make_trainer(model, pairs, folder / str(size), **sizes, **more, **options).train()
        weights.append(model.state_dict())
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=1e-6, rtol=1e-5)
