/*
 * A JMS client that knows nothing of Rooms, for tests: `java -cp 'lib/*' JmsReader.java PROTOCOL URI USER PASSWORD QUEUE COUNT
 * HOW [SELECTOR]`. PROTOCOL: amqp (Qpid JMS) or core (Artemis' own client). HOW: ack, reject, or first (ack, whatever comes after).
 * One line a message.
 */

import javax.jms.BytesMessage;
import javax.jms.Connection;
import javax.jms.ConnectionFactory;
import javax.jms.Message;
import javax.jms.MessageConsumer;
import javax.jms.Queue;
import javax.jms.Session;
import java.nio.charset.StandardCharsets;
import java.util.Collections;
import java.util.Enumeration;
import java.util.TreeSet;

public class JmsReader {
    private static final int QPID_REJECTED = 2;
    private static final long PATIENCE_MS = 60_000;
    private static final long NOTHING_MORE_MS = 300;

    public static void main(String[] given) throws Exception {
        String queueName = given[4];
        int count = Integer.parseInt(given[5]);
        boolean reject = given[6].equals("reject");
        String selector = given.length > 7 ? given[7] : null;
        try (Connection connection = factory(given[0], given[1]).createConnection(given[2], given[3])) {
            Session session = connection.createSession(false, Session.CLIENT_ACKNOWLEDGE);
            Queue queue = session.createQueue(queueName);
            MessageConsumer consumer = session.createConsumer(queue, selector);
            connection.start();
            for (int number = 0; number < count; number++) {
                Message message = consumer.receive(PATIENCE_MS);
                if (message == null) {
                    throw new IllegalStateException("nothing came");
                }
                System.out.println(told(message));
                if (reject) {
                    message.setIntProperty("JMS_AMQP_ACK_TYPE", QPID_REJECTED);
                }
                message.acknowledge();
            }
            if (!given[6].equals("first") && consumer.receive(NOTHING_MORE_MS) != null) {
                throw new IllegalStateException("more came than was asked for");
            }
        }
    }

    private static ConnectionFactory factory(String protocol, String uri) {
        if (protocol.equals("amqp")) {
            return new org.apache.qpid.jms.JmsConnectionFactory(uri);
        }
        return new org.apache.activemq.artemis.jms.client.ActiveMQConnectionFactory(uri);
    }

    /** The fields of a message as JSON; every value is plain text. */
    private static String told(Message message) throws Exception {
        BytesMessage body = (BytesMessage) message;
        byte[] bytes = new byte[(int) body.getBodyLength()];
        body.readBytes(bytes);
        StringBuilder text = new StringBuilder("{");
        field(text, "JMSMessageID", message.getJMSMessageID());
        field(text, "JMSCorrelationID", message.getJMSCorrelationID());
        field(text, "JMSType", message.getJMSType());
        field(text, "JMSPriority", String.valueOf(message.getJMSPriority()));
        TreeSet<String> names = new TreeSet<>(Collections.list((Enumeration<String>) message.getPropertyNames()));
        for (String name : names) {
            if (name.startsWith("rooms_")) {
                field(text, name, message.getStringProperty(name));
            }
        }
        field(text, "version", String.valueOf(message.getIntProperty("rooms_event_version")));
        field(text, "body", new String(bytes, StandardCharsets.ISO_8859_1));
        text.setLength(text.length() - 1);
        return text.append("}").toString();
    }

    private static void field(StringBuilder text, String name, String value) {
        text.append('"').append(name).append("\":");
        text.append(value == null ? "null" : quoted(value)).append(',');
    }

    private static String quoted(String value) {
        StringBuilder text = new StringBuilder("\"");
        for (char letter : value.toCharArray()) {
            if (letter < ' ' || letter == '"' || letter == '\\' || letter > '~') {
                text.append(String.format("\\u%04x", (int) letter));
            } else {
                text.append(letter);
            }
        }
        return text.append('"').toString();
    }
}
