"""How people get differential attention wrong: which heads form a pair, what lambda multiplies, and its gradient."""

import numpy as np

from refattn.definitions.differential import Differential, heads_of_map
from refattn.definitions.steps import step
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.scaled_dot_product import catalogue as dense

catalogue = Catalogue(Differential, built_on=dense)


@catalogue.mistake(why="Released code has both layouts: neighbours in one, halves in the other.")
class diff_pairs(Differential):
    """the pairs of heads are formed the other way: halves for neighbours, neighbours for halves"""

    @step
    def pairs(self):
        return "halves" if self.argument("pairs") == "adjacent" else "adjacent"


@catalogue.mistake(name="diff_pairs", why="Only the queries were reordered.")
class key_pairs_as_they_come(Differential):
    """the key heads are paired the other way than the query heads"""

    @step
    def first_keys(self):
        other = "halves" if self.pairs == "adjacent" else "adjacent"
        return heads_of_map(0, self.k.shape[-3], other) if self.has_two_keys else super().first_keys

    @step
    def second_keys(self):
        other = "halves" if self.pairs == "adjacent" else "adjacent"
        return heads_of_map(1, self.k.shape[-3], other) if self.has_two_keys else super().second_keys


@catalogue.mistake(why="Single key heads are repeated where pairs of them should be.")
class diff_gqa_single(Differential):
    """both maps of a pair read the first key head of their group"""

    @step
    def second_keys(self):
        return self.first_keys


@catalogue.mistake(why="The sign of a difference.")
class diff_sign(Differential):
    """the maps are added, not subtracted"""

    @step
    def output(self):
        return self.first.output + self.factor * self.second.output

    @step
    def d_second_output(self):
        return -super().d_second_output

    @step
    def d_lam(self):
        return -super().d_lam


@catalogue.mistake(why="The factor of the wrong term.", name="diff_lambda")
class lambda_on_the_first(Differential):
    """lambda multiplies the first map"""

    @step
    def output(self):
        return self.factor * self.first.output - self.second.output

    @step
    def d_first(self):
        return self.first.pull(output=self.factor * self.cotangent("output"), lse=self.d_lses[0])

    @step
    def d_second_output(self):
        return -self.cotangent("output")


@catalogue.mistake(why="The parameter is left at its start.", name="diff_lambda")
class lambda_left_out(Differential):
    """lambda is taken for 1"""

    @step
    def factor(self):
        return 1.0


@catalogue.mistake(why="One lambda for a layer, as in the first version.", name="diff_lambda_layer")
class lambda_of_a_layer(Differential):
    """every token and head has the mean lambda"""

    @step
    def factor(self):
        return float(np.mean(self.lam))


@catalogue.mistake(why="The maps are exchanged.", name="diff_swapped")
class maps_exchanged(Differential):
    """the first map is subtracted from the second"""

    @step
    def first_heads(self):
        return heads_of_map(1, self.query_heads, self.pairs)

    @step
    def second_heads(self):
        return heads_of_map(0, self.query_heads, self.pairs)

    @step
    def first_keys(self):
        return super().second_keys

    @step
    def second_keys(self):
        return super().first_keys


@catalogue.mistake(why="Negative weights are taken for an error and clipped.", name="diff_dropped")
class second_map_dropped(Differential):
    """the second map is left out"""

    @step
    def output(self):
        return self.first.output + 0.0 * self.factor

    @step
    def d_second_output(self):
        return np.zeros(np.shape(self.second.output))

    @step
    def d_lam(self):
        return np.zeros(np.shape(self.lam))


@catalogue.mistake(why="The output is normalised to weights that sum to 1.", name="diff_renormalised")
class weights_sum_to_one(Differential):
    """the output is divided by 1 - lambda"""

    @step
    def output(self):
        return super().output / (1 - self.factor)


@catalogue.mistake(why="lambda is a constant of the layer.", sides=("backward",), name="lam_grad")
class lambda_gradient_dropped(Differential):
    """the gradient of lambda is 0"""

    @step
    def d_lam(self):
        return np.zeros(np.shape(self.lam))


@catalogue.mistake(why="The sign is lost on the way through two kernels.", sides=("backward",), name="lam_grad")
class lambda_gradient_sign(Differential):
    """the gradient of lambda has the opposite sign"""

    @step
    def d_lam(self):
        return -super().d_lam


@catalogue.mistake(why="The backward is called twice with the same cotangent.", sides=("backward",), name="diff_grad")
class second_map_without_lambda(Differential):
    """the second map's gradients lack lambda"""

    @step
    def d_second_output(self):
        return -self.cotangent("output")


@catalogue.mistake(why="One map's gradient overwrites the other's.", sides=("backward",), name="diff_grad")
class value_gradient_of_one_map(Differential):
    """the values' gradient is that of the first map alone"""

    @step
    def d_v(self):
        return self.d_first.d_v
