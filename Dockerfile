# Trains the English-German demo on a CPU:
#   docker build --tag metaphrase .
#   mkdir -p runs    # else docker makes it, and only root may write there
#   docker run --rm --volume "$PWD/runs:/home/user/runs" metaphrase
FROM python:3.11-slim

# The build of torch for CPUs is a tenth of the size of the one for GPUs.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu \
    PIP_ROOT_USER_ACTION=ignore

COPY . /opt/metaphrase
RUN pip install --no-cache-dir --constraint /opt/metaphrase/constraints.txt /opt/metaphrase \
    && useradd --create-home --uid 1000 user \
    && install --directory --owner=user /home/user/runs

USER 1000
WORKDIR /home/user
ENTRYPOINT ["metaphrase"]
CMD ["demo"]
