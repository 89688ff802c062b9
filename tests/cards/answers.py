"""answers.py MODEL CHECKPOINT DATA: the model answers the conversations of a dataset; says so if it answered all."""

import sys

from examples.demo.evaluate import generated_answers

if __name__ == "__main__":
    answers = generated_answers(*sys.argv[1:])
    print("all answered" if answers and all(answer.generated for answer in answers) else "some not", flush=True)
