package line

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"os"
)

// Security is how a program proves who it is, under librdkafka's names.
type Security struct {
	Protocol    string `json:"security.protocol"`
	Authorities string `json:"ssl.ca.location"`
	Certificate string `json:"ssl.certificate.location"`
	Key         string `json:"ssl.key.location"`
	Mechanism   string `json:"sasl.mechanism"`
	User        string `json:"sasl.username"`
	Password    string `json:"sasl.password"`
}

// Secured is what the tests ask for: nothing, if Protocol is empty.
func Secured() Security {
	var asked Security
	if text := os.Getenv("PENSTOCK_TEST_SECURITY"); text != "" {
		must(json.Unmarshal([]byte(text), &asked))
	}
	return asked
}

// TLS is Go's configuration for the files that are named.
func (s Security) TLS() *tls.Config {
	authorities, err := os.ReadFile(s.Authorities)
	must(err)
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	config.RootCAs.AppendCertsFromPEM(authorities)
	if s.Certificate != "" {
		own, err := tls.LoadX509KeyPair(s.Certificate, s.Key)
		must(err)
		config.Certificates = []tls.Certificate{own}
	}
	return config
}
