import torch

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
